// Light or dark, as the system has it or as was chosen; and the page's colours as numbers, for canvases.
export const THEMES = ["auto", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];
export type Colour = readonly [number, number, number];

const KEY = "cutaway.theme";

class Themes {
  chosen = $state<Theme>("auto");
  /** What the colours are taken from. */
  root = $state<HTMLElement>();
  #turns = $state(0);
  #known = new Map<string, Colour>();

  constructor() {
    this.chosen = THEMES.find((each) => each === stored()) ?? "auto";
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (this.#turns += 1));
  }

  turn(): void {
    this.chosen = THEMES[(THEMES.indexOf(this.chosen) + 1) % THEMES.length] ?? "auto";
    try {
      localStorage.setItem(KEY, this.chosen);
    } catch {
      return; // a file or a notebook may have no storage: it holds until the page is closed
    }
  }

  /** Another text whenever the colours are others. */
  get key(): string {
    return `${this.#turns} ${this.chosen} ${this.root ? 1 : 0}`;
  }

  /** A variable's colour as it is now; whoever asks is asked again when the theme turns. */
  colour(name: string): Colour {
    const key = `${this.key} ${name}`;
    const known = this.#known.get(key);
    if (known) return known;
    const home = this.root ?? document.body;
    const probe = document.createElement("span");
    probe.style.colorScheme = this.chosen === "auto" ? "light dark" : this.chosen;
    probe.style.color = `var(--${name})`;
    home.appendChild(probe);
    const found = getComputedStyle(probe).color.match(/[\d.]+/g)?.map(Number) ?? [];
    probe.remove();
    const colour: Colour = [found[0] ?? 0, found[1] ?? 0, found[2] ?? 0];
    this.#known.set(key, colour);
    return colour;
  }
}

function stored(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

export const theme = new Themes();
