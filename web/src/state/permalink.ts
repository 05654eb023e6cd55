/** The place that a link holds: model, prompt, settings, edits, and what is looked at. */
import type { Settings } from "../sampling";
import type { Edit } from "../api";

export type View = "layer" | "heads";

export interface Place {
  model: string | null;
  text: string | null;
  ids: number[] | null;
  view: View;
  layer: number;
  head: number;
  pinned: string | null;
  cell: [number, number] | null;
  token: number | null;
  expert: number | null;
  settings: Settings;
  seed: number;
  edits: Edit[];
}

export const DEFAULTS: Settings = { temperature: 1, topK: null, topP: null, minP: null };

/** The part of an address after `#`. What stands at its default is left out. */
export function toHash(place: Place): string {
  const parts = new URLSearchParams();
  if (place.model) parts.set("m", place.model);
  if (place.ids) parts.set("i", place.ids.join("."));
  else if (place.text !== null) parts.set("p", place.text);
  if (place.view !== "layer") parts.set("v", place.view);
  if (place.layer) parts.set("l", String(place.layer));
  if (place.head) parts.set("h", String(place.head));
  if (place.pinned) parts.set("at", place.pinned);
  if (place.cell) parts.set("c", place.cell.join("."));
  if (place.token !== null) parts.set("t", String(place.token));
  if (place.expert !== null) parts.set("x", String(place.expert));
  const { temperature, topK, topP, minP } = place.settings;
  if (temperature !== 1) parts.set("T", String(temperature));
  if (topK !== null) parts.set("k", String(topK));
  if (topP !== null) parts.set("tp", String(topP));
  if (minP !== null) parts.set("mp", String(minP));
  if (place.seed) parts.set("s", String(place.seed));
  if (place.edits.length) parts.set("e", JSON.stringify(place.edits));
  return parts.toString();
}

/** A place from a link. What cannot be read is left at its default: a link never breaks the page. */
export function fromHash(hash: string): Place {
  const parts = new URLSearchParams(hash.replace(/^#/, ""));
  const whole = (name: string): number | null => {
    const text = parts.get(name);
    return text !== null && /^\d{1,15}$/.test(text) ? Number(text) : null;
  };
  const real = (name: string, low: number, high: number): number | null => {
    const value = Number(parts.get(name) || NaN);
    return Number.isFinite(value) && value >= low && value <= high ? value : null;
  };
  const list = (name: string): number[] | null => {
    const text = parts.get(name);
    return text !== null && /^\d{1,9}(\.\d{1,9})*$/.test(text) ? text.split(".").map(Number) : null;
  };
  const cell = list("c");
  const topK = whole("k");
  let edits: Edit[] = [];
  try {
    const read: unknown = JSON.parse(parts.get("e") ?? "[]");
    if (Array.isArray(read)) edits = read.filter((one) => one !== null && typeof one === "object") as Edit[];
  } catch {
    edits = [];
  }
  return {
    model: parts.get("m"),
    text: parts.get("p"),
    ids: list("i"),
    view: parts.get("v") === "heads" ? "heads" : "layer",
    layer: whole("l") ?? 0,
    head: whole("h") ?? 0,
    pinned: parts.get("at"),
    cell: cell?.length === 2 ? [cell[0], cell[1]] : null,
    token: whole("t"),
    expert: whole("x"),
    settings: {
      temperature: real("T", 0, 10) ?? 1,
      topK: topK !== null && topK >= 1 ? topK : null,
      topP: real("tp", 0.01, 1),
      minP: real("mp", 0, 1),
    },
    seed: whole("s") ?? 0,
    edits,
  };
}
