// Where one is: a screen and what is chosen on it. All of it stands in the address, so that a link leads to the same picture.
export const SCREENS = ["follow", "break", "attention", "generate", "gradients", "size", "learn"] as const;
export type Screen = (typeof SCREENS)[number];

type Changes = Record<string, string | number | null | undefined>;

class Place {
  screen = $state<Screen>("follow");
  #given = $state<Record<string, string>>({});
  /** Whether the address is this page's own; in a notebook it is not. */
  alone = true;

  get(name: string): string | undefined {
    return this.#given[name];
  }

  number(name: string): number | undefined {
    const text = this.#given[name];
    const value = text === undefined || text === "" ? NaN : Number(text);
    return Number.isFinite(value) ? value : undefined;
  }

  /** Choose something; what is null is forgotten. A step that one may want to go back over is written as one. */
  go(changes: Changes, { screen, step = false }: { screen?: Screen; step?: boolean } = {}): void {
    const next = { ...this.#given };
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === undefined) delete next[name];
      else next[name] = String(value);
    }
    this.#given = next;
    if (screen) this.screen = screen;
    const address = `#${this.address()}`;
    if (!this.alone || address === location.hash) return;
    if (step || screen) history.pushState(null, "", address);
    else history.replaceState(null, "", address);
  }

  address(screen: Screen = this.screen): string {
    return `/${screen}?${new URLSearchParams(Object.entries(this.#given).sort()).toString()}`;
  }

  /** Begin at a place, and leave the address to others. */
  aside(begin: string): void {
    this.alone = false;
    this.read(begin);
  }

  read(written: string = location.hash.slice(1)): void {
    const [path = "", query = ""] = written.split("?", 2);
    const name = path.replace(/^\//, "") as Screen;
    this.screen = SCREENS.includes(name) ? name : "follow";
    this.#given = Object.fromEntries(new URLSearchParams(query));
  }
}

export const place = new Place();
