// Before the first paint: whether the page is dark, by what was chosen on this machine or else by the system, so
// that a dark page does not flash. And a page of which a part did not arrive is loaded again: without its modules
// nothing else could say so.
{
  const { dataset } = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  /** Set `data-theme` to what is shown, `light` or `dark`; `data-chosen-theme` says which was chosen, if one was. */
  const showTheme = () => {
    const theme = dataset.chosenTheme || (system.matches ? "dark" : "light");
    if (dataset.theme !== theme) dataset.theme = theme;
  };
  try {
    const chosen = localStorage.getItem("echelon-theme");
    if (chosen === "light" || chosen === "dark") dataset.chosenTheme = chosen;
  } catch (error) {
    console.warn(error); // storage is switched off: the system's theme
  }
  showTheme();
  system.addEventListener("change", showTheme);
  new MutationObserver(showTheme).observe(document.documentElement, { attributeFilter: ["data-chosen-theme"] });

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
