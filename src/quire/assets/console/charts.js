// Small charts: lines over a common x, drawn as SVG, with a reading for the pointer and a sentence for screen readers.

import { h, replace, svg } from "./dom.js";

const WIDTH = 400;
const HEIGHT = 96;

/**
 * A chart with a title. `update(series, domain)` draws: a series has `label`, `style` (a class), `points` ([x, y] in order) and
 * maybe `fill`; `domain` is [first x, last x]. `format` writes a y value, `axis` an x value below the chart and at the pointer;
 * `ceiling` is the least upper end of the y axis.
 */
export class Chart {
  constructor(title, { format, axis, ceiling = 0, note = "" }) {
    this.format = format;
    this.axis = axis;
    this.ticks = h("div", { class: "chart-ticks", "aria-hidden": "true" });
    this.ceiling = ceiling;
    this.series = [];
    this.legend = h("span", { class: "chart-legend" });
    this.top = h("span", { class: "chart-top" });
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.cursor = h("div", { class: "chart-cursor", hidden: true });
    this.plot = h("div", { class: "plot", on: { pointermove: (event) => this.read(event), pointerleave: () => this.unread() } }, this.picture, this.top, this.cursor);
    this.title = title;
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, h("span", { class: "chart-title" }, title), this.legend), this.plot, this.ticks, note && h("p", { class: "soft small" }, note));
  }

  update(series, domain) {
    this.series = series;
    this.domain = domain;
    const values = series.flatMap(({ points }) => points.map(([, y]) => y));
    this.highest = roundUp(Math.max(this.ceiling, ...values));
    this.top.textContent = this.format(this.highest);
    const [first, last] = domain;
    replace(this.ticks, [first, (first + last) / 2, last].map((x) => h("span", {}, this.axis(x, domain))));
    replace(this.picture, series.flatMap((line) => this.draw(line)));
    const readings = series.map(({ label, points }) => `${label} ${points.length ? this.format(points.at(-1)[1]) : "–"}`);
    this.picture.setAttribute("aria-label", `${this.title}: ${readings.join(", ")}; highest ${values.length ? this.format(Math.max(...values)) : "–"}`);
    if (this.cursor.hidden) this.tell(series.map(({ points }) => points.at(-1)?.[1]));
  }

  draw({ points, style, fill }) {
    if (!points.length) return [];
    const path = points.map(([x, y], index) => `${index ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("");
    const line = svg("path", { class: `line ${style}`, d: path, "vector-effect": "non-scaling-stroke" });
    if (!fill) return [line];
    const [first, last] = [this.x(points[0][0]), this.x(points.at(-1)[0])].map((x) => x.toFixed(1));
    return [svg("path", { class: `area ${style}`, d: `${path}L${last} ${HEIGHT}L${first} ${HEIGHT}Z` }), line];
  }

  x(value) {
    const [first, last] = this.domain;
    return last > first ? (WIDTH * (value - first)) / (last - first) : WIDTH;
  }

  y(value) {
    return HEIGHT - 2 - ((HEIGHT - 6) * value) / (this.highest || 1);
  }

  /** Show what the lines say under the pointer. */
  read(event) {
    const box = this.plot.getBoundingClientRect();
    const at = (WIDTH * (event.clientX - box.left)) / box.width;
    const longest = this.series.reduce((one, two) => (two.points.length > one.length ? two.points : one), []);
    if (!longest.length) return;
    const nearest = longest.reduce((best, point, index) =>
      (Math.abs(this.x(point[0]) - at) < Math.abs(this.x(longest[best][0]) - at) ? index : best), 0);
    this.cursor.hidden = false;
    this.cursor.style.left = `${(100 * this.x(longest[nearest][0])) / WIDTH}%`;
    this.tell(this.series.map(({ points }) => points[nearest]?.[1]), this.axis(longest[nearest][0], this.domain));
  }

  unread() {
    this.cursor.hidden = true;
    this.tell(this.series.map(({ points }) => points.at(-1)?.[1]));
  }

  /** Write the values, and the place `at` that they are of. */
  tell(values, at = "") {
    replace(this.legend, at && h("span", { class: "soft" }, `${at} `), this.series.map(({ label, style }, index) =>
      h("span", { class: `key ${style}` }, `${label} `, h("strong", {}, values[index] === undefined ? "–" : this.format(values[index])))));
  }
}

/** The next round number that is no smaller. */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}
