/**
 * The colours of numbers. Two scales and no more: one for signed values, with zero in its middle, one for weights
 * that sum to one. Both are read from tables of 256 colours by the 8-bit codes that the server sends.
 */
import { scaleLinear } from "d3-scale";
import { MIDDLE, STEPS, WEIGHT_STEPS, type Kind } from "../protocol";

export interface Palette {
  dark: boolean;
  signed: Uint32Array;
  weights: Uint32Array;
  ink: string;
  soft: string;
  faint: string;
  line: string;
  panel: string;
  page: string;
  attention: string;
  feedForward: string;
  stream: string;
  selected: string;
  edit: string;
}

export const ATTENTION = "#8b7fd6";
export const FEED_FORWARD = "#3fa58f";

// Orange and blue keep apart for every kind of colour blindness; the middle is the paper.
const LIGHT_SIGNED = ["#0b4a8f", "#3f83cc", "#a9cbec", "#f4f3f0", "#f3c69c", "#d9813b", "#8a4208"];
const DARK_SIGNED = ["#9fd0ff", "#4f8fd0", "#274d78", "#22252a", "#6e4220", "#d9813b", "#ffcf9e"];
const STOPS = [-1, -0.55, -0.15, 0, 0.15, 0.55, 1];
// Cividis reads alike with and without red-green blindness. On paper it runs from light to dark, so that "much" is
// what stands out from the ground in both themes.
const CIVIDIS = ["#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838"];
const PAPER_WEIGHTS = ["#f3f2ee", "#d6dbe4", "#a3b2cb", "#6b83ab", "#3a5584", "#0b2a57"];

function packed(colour: string): number {
  const [r, g, b] = channels(colour);
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

export function channels(colour: string): [number, number, number] {
  if (colour.startsWith("#")) {
    const n = parseInt(colour.slice(1), 16);
    return [(n >> 16) & 255, (n >> 8) & 255, n & 255];
  }
  const found = colour.match(/\d+/g)!.map(Number);
  return [found[0], found[1], found[2]];
}

/** 256 packed colours for codes: 0 is transparent (hidden cells are hatched by whoever draws). */
export function signedTable(dark: boolean): Uint32Array {
  const scale = scaleLinear<string>().domain(STOPS).range(dark ? DARK_SIGNED : LIGHT_SIGNED).clamp(true);
  const table = new Uint32Array(256);
  for (let code = 1; code < 256; code++) table[code] = packed(scale((code - MIDDLE) / STEPS));
  return table;
}

export function weightTable(dark: boolean): Uint32Array {
  const colours = dark ? CIVIDIS : PAPER_WEIGHTS;
  const scale = scaleLinear<string>()
    .domain(colours.map((_, i) => i / (colours.length - 1)))
    .range(colours)
    .clamp(true);
  const table = new Uint32Array(256);
  // The colour follows the root of the weight, so that small weights can be told from none.
  for (let code = 1; code < 256; code++) table[code] = packed(scale(Math.sqrt((code - 1) / WEIGHT_STEPS)));
  return table;
}

export function palette(dark: boolean): Palette {
  return {
    dark,
    signed: signedTable(dark),
    weights: weightTable(dark),
    ink: dark ? "#ecebe7" : "#1b1e23",
    soft: dark ? "#a2a7ae" : "#5a6069",
    faint: dark ? "#3b4047" : "#cfcfca",
    line: dark ? "#2c3037" : "#e2e1dc",
    panel: dark ? "#1a1d21" : "#ffffff",
    page: dark ? "#121417" : "#f6f5f2",
    attention: ATTENTION,
    feedForward: FEED_FORWARD,
    stream: dark ? "#6d737b" : "#a9a9a4",
    selected: dark ? "#ff6fb5" : "#c2187b",
    edit: "#ffcc00",
  };
}

export function tableOf(kind: Kind, colours: Palette): Uint32Array {
  return kind === "weights" ? colours.weights : colours.signed;
}

/** The code of a value, as the server would send it. */
export function codeOf(value: number, kind: Kind, scale: number): number {
  if (!Number.isFinite(value)) return 0;
  if (kind === "weights") return 1 + Math.round(Math.min(Math.max(value, 0), 1) * WEIGHT_STEPS);
  return MIDDLE + Math.round(Math.min(Math.max(value / scale, -1), 1) * STEPS);
}

/** What a code stands for, to the precision of 8 bits; null where the cell is hidden. */
export function valueOf(code: number, kind: Kind, scale: number): number | null {
  if (code === 0) return null;
  return kind === "weights" ? (code - 1) / WEIGHT_STEPS : ((code - MIDDLE) / STEPS) * scale;
}

/** A colour as CSS. */
export function css(packedColour: number): string {
  return `rgb(${packedColour & 255},${(packedColour >> 8) & 255},${(packedColour >> 16) & 255})`;
}

/** Whether dark letters read better on this colour than light ones. */
export function wantsDarkLetters(packedColour: number): boolean {
  const parts = [packedColour & 255, (packedColour >> 8) & 255, (packedColour >> 16) & 255].map((c) => {
    const s = c / 255;
    return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] > 0.199; // where both letters have the same contrast, 4.2
}
