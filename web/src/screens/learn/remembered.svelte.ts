// Which lessons were seen and which questions answered: on this page, and where the browser lets it, the next time too.
const KEY = "cutaway.learn";

interface Kept {
  seen: string[];
  right: Record<string, boolean>;
}

class Remembered {
  seen = $state<string[]>([]);
  /** By question: whether the last answer was right. */
  right = $state<Record<string, boolean>>({});

  constructor() {
    const kept = read();
    [this.seen, this.right] = [kept.seen, kept.right];
  }

  see(slug: string): void {
    if (this.seen.includes(slug)) return;
    this.seen = [...this.seen, slug];
    this.#write();
  }

  answer(id: string, right: boolean): void {
    this.right = { ...this.right, [id]: right };
    this.#write();
  }

  #write(): void {
    try {
      localStorage.setItem(KEY, JSON.stringify({ seen: this.seen, right: this.right }));
    } catch {
      return; // a file or a notebook may have no storage: it holds until the page is closed
    }
  }
}

function read(): Kept {
  try {
    const found = JSON.parse(localStorage.getItem(KEY) ?? "{}") as Partial<Kept>;
    const right = Object.entries(found.right ?? {}).filter(([, value]) => typeof value === "boolean");
    return { seen: Array.isArray(found.seen) ? found.seen.filter((each) => typeof each === "string") : [], right: Object.fromEntries(right) };
  } catch {
    return { seen: [], right: {} };
  }
}

export const remembered = new Remembered();
