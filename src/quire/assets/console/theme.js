// The reader's theme, before anything is drawn: `light`, `dark`, or none, which follows the system. Loaded in the head.
try {
  const theme = localStorage.getItem("quire.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // A browser that keeps nothing: the system's theme.
}
