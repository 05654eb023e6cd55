/** Which token goes to which expert, and what that looks like: the routes of a layer, read from the run. */
import type { Tensor } from "../api";
import type { Cell, Flow } from "./flow";
import type { Palette } from "./scales";

export interface Route {
  token: number;
  expert: number;
  gate: number;
  /** Which of the token's choices it is; 0 the best. */
  choice: number;
}

/** Every (token, expert) pair of a pass, from `moe.chosen` and `moe.gates`, both `[1, T, k]`. */
export function routesOf(chosen: Tensor | undefined, gates: Tensor | undefined): Route[] {
  if (!chosen?.f32 || !gates?.f32) return [];
  const [, tokens, k] = chosen.shape;
  const found: Route[] = [];
  for (let token = 0; token < tokens; token++) {
    for (let choice = 0; choice < k; choice++) {
      const at = token * k + choice;
      found.push({ token, expert: chosen.f32[at], gate: gates.f32[at], choice });
    }
  }
  return found;
}

/** For each expert the gate of every token `[E][T]`, null where the token does not go there: nothing was computed. */
export function loads(routes: Route[], experts: number, tokens: number): (number | null)[][] {
  const found = Array.from({ length: experts }, () => new Array<number | null>(tokens).fill(null));
  for (const route of routes) if (found[route.expert]) found[route.expert][route.token] = route.gate;
  return found;
}

export interface Chosen {
  token: number | null;
  expert: number | null;
}

const MOST_LINES = 1500;

/** Routes that are worth a line of their own: all of a short prompt, else those of what is chosen. */
export function linesOf(routes: Route[], chosen: Chosen, tokens: number): Route[] {
  if (routes.length <= MOST_LINES) return routes;
  return routes.filter((route) =>
    chosen.expert !== null ? route.expert === chosen.expert : route.token === (chosen.token ?? tokens - 1),
  );
}

/** Lines from each token's row to its experts, as thick as the gate; what is chosen stands out. */
export function paintRoutes(
  c: CanvasRenderingContext2D,
  flow: Flow,
  rows: Cell,
  slots: Cell[],
  routes: Route[],
  tokens: number,
  chosen: Chosen,
  colours: Palette,
): void {
  if (!flow.routes) return;
  const left = flow.routes.x + 2;
  const right = flow.routes.x + flow.routes.w - 2;
  const each = rows.h / tokens;
  const anything = chosen.token !== null || chosen.expert !== null;
  const stands = (route: Route) => route.token === chosen.token || route.expert === chosen.expert;
  const lines = linesOf(routes, chosen, tokens);
  const largest = Math.max(1e-6, ...lines.map((route) => Math.abs(route.gate)));
  const draw = (route: Route) => {
    const slot = slots[route.expert];
    if (!slot) return;
    const y0 = rows.y + (route.token + 0.5) * each;
    const y1 = slot.y + slot.h / 2;
    const out = anything && stands(route);
    c.strokeStyle = route.token === chosen.token ? colours.selected : colours.feedForward;
    c.globalAlpha = !anything ? 0.62 : out ? 0.95 : 0.13;
    c.lineWidth = 0.5 + (Math.max(1.6, Math.min(each * 0.6, 4)) * Math.abs(route.gate)) / largest;
    c.beginPath();
    c.moveTo(left, y0);
    c.bezierCurveTo(left + (right - left) * 0.5, y0, right - (right - left) * 0.5, y1, right, y1);
    c.stroke();
  };
  for (const route of lines) if (!anything || !stands(route)) draw(route);
  if (anything) for (const route of lines) if (stands(route)) draw(route);
  c.globalAlpha = 1;
}

/** One expert's slot: its number, and a cell for each token in the colour of its gate; blank where none was sent. */
export function paintSlot(
  c: CanvasRenderingContext2D,
  slot: Cell,
  number: number,
  load: (number | null)[],
  largest: number,
  chosen: Chosen,
  off: boolean,
  font: string,
  colours: Palette,
): void {
  const named = slot.h >= 10;
  const margin = named ? 20 : 0;
  const width = slot.w - margin;
  const used = load.some((gate) => gate !== null);
  const picked = chosen.expert === number;
  c.fillStyle = colours.dark ? "#202429" : "#f6f5f2";
  c.fillRect(slot.x + margin, slot.y, width, slot.h);
  const cells = Math.min(load.length, Math.floor(width * 2));
  for (let i = 0; i < cells; i++) {
    let gate: number | null = null;
    const stop = Math.max(Math.floor(((i + 1) * load.length) / cells), Math.floor((i * load.length) / cells) + 1);
    for (let t = Math.floor((i * load.length) / cells); t < stop; t++) {
      if (load[t] !== null && (gate === null || Math.abs(load[t]!) > gate)) gate = Math.abs(load[t]!);
    }
    if (gate === null) continue;
    const code = 1 + Math.round(Math.min(1, gate / largest) * 254);
    const packed = colours.weights[Math.max(30, code)];
    const mine = load.length <= cells && i === chosen.token;
    c.fillStyle = mine ? colours.selected : `rgb(${packed & 255},${(packed >> 8) & 255},${(packed >> 16) & 255})`;
    c.fillRect(slot.x + margin + (i * width) / cells, slot.y, Math.max(1, width / cells - (width / cells > 4 ? 1 : 0)), slot.h);
  }
  if (slot.h >= 5) {
    c.lineWidth = picked ? 2 : 1;
    c.strokeStyle = picked ? colours.selected : colours.line;
    c.strokeRect(slot.x + margin - 0.5, slot.y - 0.5, width + 1, slot.h + 1);
  } else if (picked) {
    c.lineWidth = 2;
    c.strokeStyle = colours.selected;
    c.strokeRect(slot.x - 2, slot.y - 2, slot.w + 4, slot.h + 4);
  }
  if (named) {
    c.textAlign = "center";
    c.textBaseline = "middle";
    c.font = `${picked ? 650 : used ? 560 : 400} 11px ${font}`;
    c.fillStyle = off ? colours.soft : picked ? colours.selected : used ? colours.ink : colours.soft;
    c.fillText(String(number), slot.x + margin / 2 - 1, slot.y + slot.h / 2 + 0.5);
  }
}
