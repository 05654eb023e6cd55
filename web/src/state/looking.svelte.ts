/** The place that the page looks at: all that a link keeps, whatever has been computed of it. */
import type { Edit } from "../api";
import type { ModelCard, NextTokenCard } from "../protocol";
import type { Settings } from "../sampling";
import { DEFAULTS, type Place, toHash, type View } from "./permalink";
import { layerKind, pointCard, shape3 } from "./points";

export interface Drawn {
  token: NextTokenCard;
  uniform: number;
}

export class Looking {
  wanted = $state("");
  model = $state("");

  text = $state("");
  /** Ids in place of the text, where the prompt has grown by drawn tokens; null while the text itself is run. */
  ids = $state.raw<number[] | null>(null);
  grown = $state.raw<Drawn[]>([]);

  view = $state<View>("layer");
  layer = $state(0);
  head = $state(0);
  token = $state<number | null>(null);
  expert = $state<number | null>(null);
  pinned = $state<string | null>(null);
  cell = $state.raw<[number, number] | null>(null);

  settings = $state.raw<Settings>(DEFAULTS);
  seed = $state(0);
  edits = $state.raw<Edit[]>([]);

  /** Everything that a link keeps. */
  get place(): Place {
    return {
      model: this.wanted || this.model,
      text: this.text,
      ids: this.ids,
      view: this.view,
      layer: this.layer,
      head: this.head,
      pinned: this.pinned,
      cell: this.cell,
      token: this.token,
      expert: this.expert,
      settings: this.settings,
      seed: this.seed,
      edits: this.edits,
    };
  }

  /** Look where a link says; its model is chosen elsewhere. */
  protected take(place: Place): void {
    this.view = place.view;
    this.layer = place.layer;
    this.head = place.head;
    this.pinned = place.pinned;
    this.cell = place.cell;
    this.token = place.token;
    this.expert = place.expert;
    this.settings = place.settings;
    this.seed = place.seed;
    this.edits = place.edits;
    if (place.text !== null) this.text = place.text;
    this.ids = place.ids;
    this.grown = [];
  }

  /** Keep the place inside what a pass of so many tokens has. */
  protected settle(card: ModelCard, tokens: number): void {
    this.layer = Math.min(this.layer, card.sizes.N - 1);
    this.head = Math.min(this.head, layerKind(card, this.layer).sizes.H - 1);
    if (this.token !== null && this.token >= tokens) this.token = null;
    if (this.expert !== null && this.expert >= (layerKind(card, this.layer).sizes.E ?? 0)) this.expert = null;
    if (this.pinned !== null && pointCard(card, this.pinned) === null) {
      this.pinned = null;
      this.cell = null;
    }
    if (this.pinned !== null && this.cell !== null) {
      const [, rows, columns] = shape3(card, this.pinned, tokens);
      if (this.cell[0] >= rows || this.cell[1] >= columns) this.cell = null;
    }
  }

  /** Write the place into the page's address. */
  protected link(): void {
    const hash = toHash(this.place);
    if (location.hash.slice(1) !== hash) history.replaceState(null, "", `#${hash}`);
  }
}
