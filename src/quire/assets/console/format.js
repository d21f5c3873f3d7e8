// Numbers and names for people.

/** Seconds as ms, s, min or h. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 ms";
  if (value < 0.001) return `${(value * 1000).toFixed(2)} ms`;
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 0)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${Math.round(value / 3600)} h`;
}

/** A number with narrow spaces between thousands; small ones with a digit after the point. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  const rounded = Math.abs(value) < 100 && !Number.isInteger(value) ? value.toFixed(1) : String(Math.round(value));
  return rounded.replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
}

/** A share of 1 as a percentage. */
export function share(value) {
  const isNearEnd = (value > 0 && value < 0.1) || (value > 0.99 && value < 1);
  return `${(Math.floor(1000 * value) / 10).toFixed(isNearEnd ? 1 : 0)} %`;
}

/** Long ids by their ends; the whole one belongs in a title. */
export function shortId(id) {
  return id.length > 22 ? `${id.slice(0, 13)}…${id.slice(-6)}` : id;
}
