// State in the URL fragment: the screen and the selection on it, so that a link reproduces the view.
import { exportedPage } from "./exportTransport";

const ALL_SCREENS = ["model", "trace", "edit", "compare", "attention", "generate", "training", "size", "check", "learn"] as const;
export type Screen = (typeof ALL_SCREENS)[number];
/** Screens that need a server: an exported page does not have them. */
const SERVER_SCREENS: readonly Screen[] = ["compare", "training", "check"];
export const SCREENS: readonly Screen[] = ALL_SCREENS.filter((screen) => !SERVER_SCREENS.includes(screen) || !exportedPage());

/** Former names of screens in links. */
const RENAMED_SCREENS: Record<string, Screen> = { gradients: "training" };

type Changes = Record<string, string | number | null | undefined>;

class UrlState {
  screen = $state<Screen>("model");
  #params = $state<Record<string, string>>({});
  /** Whether the page may change the address; false in a notebook. */
  ownsAddress = true;

  get(name: string): string | undefined {
    return this.#params[name];
  }

  number(name: string): number | undefined {
    const text = this.#params[name];
    const value = text === undefined || text === "" ? NaN : Number(text);
    return Number.isFinite(value) ? value : undefined;
  }

  /** Set parameters; null removes one. `pushHistory` adds a history entry, so that the back button undoes the change. */
  update(changes: Changes, { screen, pushHistory = false }: { screen?: Screen; pushHistory?: boolean } = {}): void {
    const next = { ...this.#params };
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === undefined) delete next[name];
      else next[name] = String(value);
    }
    this.#params = next;
    if (screen) this.screen = screen;
    const address = `#${this.toFragment()}`;
    if (!this.ownsAddress || address === location.hash) return;
    if (pushHistory || screen) history.pushState(null, "", address);
    else history.replaceState(null, "", address);
  }

  /** Remove all parameters, such as when another model is opened. */
  clear(): void {
    this.update(Object.fromEntries(Object.keys(this.#params).map((name) => [name, null])), { pushHistory: true });
  }

  toFragment(screen: Screen = this.screen): string {
    return `/${screen}?${new URLSearchParams(Object.entries(this.#params).sort()).toString()}`;
  }

  /** Start from a fragment without using the address of the surrounding document. */
  embed(fragment: string): void {
    this.ownsAddress = false;
    this.parseFragment(fragment);
  }

  parseFragment(fragment: string = location.hash.slice(1)): void {
    const [path = "", query = ""] = fragment.split("?", 2);
    const requested = path.replace(/^\//, "");
    const name = (RENAMED_SCREENS[requested] ?? requested) as Screen;
    this.screen = SCREENS.includes(name) ? name : "model";
    this.#params = Object.fromEntries(new URLSearchParams(query));
    if (requested in RENAMED_SCREENS && this.ownsAddress) history.replaceState(null, "", `#${this.toFragment()}`);
  }
}

export const urlState = new UrlState();
