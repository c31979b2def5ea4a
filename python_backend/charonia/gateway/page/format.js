// Writes numbers for people. An unknown value is a dash.

const NONE = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });

/** Write a number of things, with a unit from 100,000 on: 1,204 or 1.2M. */
export function count(value) {
  if (!Number.isFinite(value)) return NONE;
  return value < 1e5 ? whole.format(value) : short.format(value);
}

/** Write a rate with three digits, or zero. */
export function rate(value) {
  if (!Number.isFinite(value)) return NONE;
  return value === 0 || value >= 99.95 ? count(value) : value.toFixed(1);
}

/** Write a share of 0 to 1. */
export function percent(value) {
  if (!Number.isFinite(value)) return NONE;
  const percents = value * 100;
  return `${percents > 0 && percents < 9.95 ? percents.toFixed(1) : whole.format(percents)} %`;
}

/** Write milliseconds. */
export function milliseconds(value) {
  if (!Number.isFinite(value)) return NONE;
  if (value >= 9995) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 999.5) return `${(value / 1000).toFixed(2)} s`;
  return value >= 9.95 ? `${whole.format(value)} ms` : `${value.toFixed(1)} ms`;
}

/** Write seconds as the largest two units. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return NONE;
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  let rest = Math.max(0, Math.floor(seconds));
  const parts = [];
  for (const [name, size] of units) {
    const number = Math.floor(rest / size);
    rest -= number * size;
    if (number > 0 || (name === "s" && parts.length === 0)) parts.push(`${number} ${name}`);
    else if (parts.length > 0) break;
    if (parts.length === 2) break;
  }
  return parts.join(" ");
}

/** Write a number with its noun. */
export function counted(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}
