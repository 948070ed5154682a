// Progress of the learner: viewed lessons and answered questions, stored in localStorage where available.
const KEY = "cutaway.learn";

interface StoredProgress {
  seen: string[];
  correct: Record<string, boolean>;
}

class ProgressStore {
  seen = $state<string[]>([]);
  /** Whether the last answer was correct, by question id. */
  correct = $state<Record<string, boolean>>({});

  constructor() {
    const stored = readStoredProgress();
    [this.seen, this.correct] = [stored.seen, stored.correct];
  }

  markSeen(slug: string): void {
    if (this.seen.includes(slug)) return;
    this.seen = [...this.seen, slug];
    this.#write();
  }

  answer(id: string, correct: boolean): void {
    this.correct = { ...this.correct, [id]: correct };
    this.#write();
  }

  #write(): void {
    try {
      localStorage.setItem(KEY, JSON.stringify({ seen: this.seen, correct: this.correct }));
    } catch {
      return; // files and notebooks may have no storage: progress lasts until the page is closed
    }
  }
}

function readStoredProgress(): StoredProgress {
  try {
    const stored = JSON.parse(localStorage.getItem(KEY) ?? "{}") as Partial<StoredProgress>;
    const correct = Object.entries(stored.correct ?? {}).filter(([, value]) => typeof value === "boolean");
    return { seen: Array.isArray(stored.seen) ? stored.seen.filter((slug) => typeof slug === "string") : [], correct: Object.fromEntries(correct) };
  } catch {
    return { seen: [], correct: {} };
  }
}

export const progressStore = new ProgressStore();
