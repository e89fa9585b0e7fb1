// Before the first paint: the theme that was chosen on this machine, so that a dark page does not flash. And a
// page of which a part did not arrive is loaded again: without its modules nothing else could say so.
{
  let theme = null;
  try {
    theme = localStorage.getItem("echelon-theme");
  } catch (error) {
    theme = null; // storage is switched off: the system's theme
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;

  const RETRY_MS = 1500;
  const onError = (event) => {
    if (!(event.target instanceof HTMLScriptElement)) return;
    const banner = document.getElementById("banner");
    if (banner) {
      banner.hidden = false;
      banner.textContent = "A part of the page did not arrive; trying again.";
    }
    setTimeout(() => location.reload(), RETRY_MS);
  };
  window.addEventListener("error", onError, true);
}
