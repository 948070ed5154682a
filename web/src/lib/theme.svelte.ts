// Light or dark, as the system has it or as was chosen; and the page's colors as numbers, for canvases.
export const THEMES = ["auto", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];
export type Color = readonly [number, number, number];

const KEY = "cutaway.theme";

class ThemeStore {
  chosen = $state<Theme>("auto");
  /** What the colors are taken from. */
  root = $state<HTMLElement>();
  #turns = $state(0);
  #known = new Map<string, Color>();

  constructor() {
    this.chosen = THEMES.find((each) => each === stored()) ?? "auto";
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (this.#turns += 1));
  }

  cycle(): void {
    this.chosen = THEMES[(THEMES.indexOf(this.chosen) + 1) % THEMES.length] ?? "auto";
    try {
      localStorage.setItem(KEY, this.chosen);
    } catch {
      return; // a file or a notebook may have no storage: it holds until the page is closed
    }
  }

  /** Another text whenever the colors are others. */
  get key(): string {
    return `${this.#turns} ${this.chosen} ${this.root ? 1 : 0}`;
  }

  /** A variable's color as it is now; whoever asks is asked again when the theme turns. */
  color(name: string): Color {
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
    const color: Color = [found[0] ?? 0, found[1] ?? 0, found[2] ?? 0];
    this.#known.set(key, color);
    return color;
  }
}

function stored(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

export const theme = new ThemeStore();
