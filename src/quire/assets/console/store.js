// What survives a reload of the page: kept for this tab only, apart from the theme.

const PREFIX = "quire.";

/** A value that was kept in this tab, or `fallback`. */
export function recall(name, fallback) {
  try {
    return JSON.parse(sessionStorage.getItem(PREFIX + name)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Keep a value until the tab closes; what is too large is not kept. */
export function keep(name, value) {
  try {
    sessionStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    sessionStorage.removeItem(PREFIX + name);
  }
}
