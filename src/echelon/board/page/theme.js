// Before the first paint: the theme that was chosen on this machine, so that a dark page does not flash.
{
  let theme = null;
  try {
    theme = localStorage.getItem("echelon-theme");
  } catch (error) {
    theme = null; // storage is switched off: the system's theme
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
