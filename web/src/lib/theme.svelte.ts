// Color theme (system, light or dark), and the CSS colors as RGB numbers for canvases.
export const THEMES = ["auto", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];
export type Color = readonly [number, number, number];

const KEY = "cutaway.theme";

class ThemeStore {
  chosen = $state<Theme>("auto");
  /** Element whose CSS variables define the colors. */
  root = $state<HTMLElement>();
  #systemChanges = $state(0);
  #colors = new Map<string, Color>();

  constructor() {
    this.chosen = THEMES.find((name) => name === readStoredTheme()) ?? "auto";
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (this.#systemChanges += 1));
  }

  cycle(): void {
    this.chosen = THEMES[(THEMES.indexOf(this.chosen) + 1) % THEMES.length] ?? "auto";
    try {
      localStorage.setItem(KEY, this.chosen);
    } catch {
      return; // files and notebooks may have no storage: the choice lasts until the page is closed
    }
  }

  /** Cache key of the colors; changes with the theme. */
  get key(): string {
    return `${this.#systemChanges} ${this.chosen} ${this.root ? 1 : 0}`;
  }

  /** Color of a CSS variable. Reactive: effects that read it rerun when the theme changes. */
  color(name: string): Color {
    const key = `${this.key} ${name}`;
    const cached = this.#colors.get(key);
    if (cached) return cached;
    const parent = this.root ?? document.body;
    const probe = document.createElement("span");
    probe.style.colorScheme = this.chosen === "auto" ? "light dark" : this.chosen;
    probe.style.color = `var(--${name})`;
    parent.appendChild(probe);
    const channels = getComputedStyle(probe).color.match(/[\d.]+/g)?.map(Number) ?? [];
    probe.remove();
    const color: Color = [channels[0] ?? 0, channels[1] ?? 0, channels[2] ?? 0];
    this.#colors.set(key, color);
    return color;
  }
}

function readStoredTheme(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

export const theme = new ThemeStore();
