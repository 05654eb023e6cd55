/** How numbers, sizes and tokens are written, everywhere on the page. */

/** Four significant digits, with a true minus sign; `×10ⁿ` where it must. */
export function number(value: number | null, digits = 4): string {
  if (value === null) return "−∞";
  if (Number.isNaN(value)) return "×";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text: string;
  if (size < 1e-4 || size >= 1e6) {
    const [mantissa, power] = value.toExponential(digits - 2).split("e");
    text = `${mantissa}×10${superscript(Number(power))}`;
  } else {
    text = value.toPrecision(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
    if (text.includes("e")) text = String(Math.round(value));
  }
  return text.replace(/^-/, "−");
}

function superscript(power: number): string {
  return String(power).replace(/./g, (c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(c)]));
}

export function percent(p: number): string {
  if (p === 0) return "0 %";
  if (p < 0.0001) return "< 0.01 %";
  return `${(100 * p).toFixed(p < 0.1 ? 2 : 1)} %`;
}

export function count(n: number): string {
  return n.toLocaleString("en").replace(/,/g, " ");
}

export function work(flops: number): string {
  if (flops < 1e6) return `${number(flops / 1e3, 3)} kFLOP`;
  return flops < 1e9 ? `${number(flops / 1e6, 3)} MFLOP` : `${number(flops / 1e9, 3)} GFLOP`;
}

export function bytes(n: number): string {
  if (n < 1e3) return `${n} B`;
  if (n < 1e6) return `${number(n / 1e3, 3)} kB`;
  return n < 1e9 ? `${number(n / 1e6, 3)} MB` : `${number(n / 1e9, 3)} GB`;
}

/** A token as a chip shows it: spaces and line breaks made visible. */
export function visible(piece: string): string {
  if (piece === "") return "∅";
  return piece.replace(/\\n|\n/g, "⏎").replace(/\t|\\t/g, "⇥").replace(/ /g, "·");
}

/** A text of at most `most` characters, an ellipsis in the place of what does not fit. */
export function shortened(text: string, most: number): string {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** `[H, T, T]` beside `[9, 13, 13]`. */
export function shape(parts: (string | number)[]): string {
  return parts.join(" × ");
}

export function plural(n: number, what: string): string {
  return `${count(n)} ${what}${n === 1 ? "" : "s"}`;
}
