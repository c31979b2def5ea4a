// Sets the remembered theme before the page is painted. Without one, the system's counts.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("charonia.theme");
  } catch {
    // Storage may be forbidden.
  }
  if (theme === "light" || theme === "dark") {
    document.documentElement.dataset.theme = theme;
  }
})();
