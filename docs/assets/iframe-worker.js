// A browser starts no worker for a page that it opened from a disk. The search then runs in a frame
// of the page, which takes and sends messages as a worker does. The theme would fetch such a script
// from elsewhere; its name there is in the name of this file, by which the theme knows it.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.isReady = new Promise((resolve) => {
        const script = frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = resolve;
        frame.contentDocument.body.append(script);
      });
    }
    postMessage(data) {
      this.isReady.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
