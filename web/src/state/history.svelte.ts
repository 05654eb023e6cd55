/** What was done, so that it can be undone: places one can go back to. */
import { type Place, toHash } from "./permalink";

export interface Snapshot {
  place: Place;
  label: string;
}

const MOST = 100;

export class History {
  undone = $state.raw<Snapshot[]>([]);
  done = $state.raw<Snapshot[]>([]);

  /** Keep a place; the same place twice in a row is kept once. */
  remember(place: Place, label: string): void {
    const top = this.done.at(-1);
    if (top && toHash(top.place) === toHash(place)) return;
    this.done = [...this.done.slice(1 - MOST), { place, label }];
    this.undone = [];
  }

  /** The place to go back to from `now`; null where there is none. */
  undo(now: Place): Snapshot | null {
    const back = this.done.at(-1);
    if (!back) return null;
    this.done = this.done.slice(0, -1);
    this.undone = [...this.undone, { place: now, label: back.label }];
    return back;
  }

  redo(now: Place): Snapshot | null {
    const again = this.undone.at(-1);
    if (!again) return null;
    this.undone = this.undone.slice(0, -1);
    this.done = [...this.done, { place: now, label: again.label }];
    return again;
  }
}
