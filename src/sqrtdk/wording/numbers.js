// Numbers as text by the rule of numbers.py, for the pages and for the sliders of the report.
export const DIGITS = 4, LEAST = 1e-3, MOST = 1e5;
const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** A power of ten as it is written by hand. */
export function namePower(exponent) {
  const raised = [...String(Math.abs(exponent))].map((digit) => SUPERSCRIPTS[digit]).join("");
  return `10${exponent < 0 ? "⁻" : ""}${raised}`;
}

// [mantissa, exponent] in so many digits, rounded as Python rounds: a tie goes to the even digit.
function round(size, digits) {
  const [whole, exponent] = size.toExponential(40).split("e");
  const all = whole.replace(".", "");
  const is_even_tie = /^50*$/.test(all.slice(digits)) && "02468".includes(all[digits - 1]);
  return is_even_tie ? [`${all[0]}.${all.slice(1, digits)}`, exponent] : size.toExponential(digits - 1).split("e");
}

/** A number in so many significant digits, larger ones without decimals; an en dash for none. */
export function writeNumber(value, digits = DIGITS) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value), sign = value < 0 ? "−" : "";
  if (size === 0) return "0";
  if (size === Infinity) return `${sign}∞`;
  if (size < LEAST || size >= MOST) {
    const [mantissa, exponent] = round(size, 2);
    return `${sign}${mantissa}·${namePower(Number(exponent))}`;
  }
  const before = Math.floor(Math.log10(size)) + 1;
  return sign + String(Number(round(size, Math.max(digits, before)).join("e")));
}

/** A share in percent, in two digits. */
export const writePercent = (share) => (share > 0 && share < 1e-3 ? "less than 0.1%" : `${writeNumber(100 * share, 2)}%`);
