// Which lessons were seen and which questions answered: on this page, and where the browser lets it, the next time too.
const KEY = "cutaway.learn";

interface StoredProgress {
  seen: string[];
  correct: Record<string, boolean>;
}

class ProgressStore {
  seen = $state<string[]>([]);
  /** By question: whether the last answer was correct. */
  correct = $state<Record<string, boolean>>({});

  constructor() {
    const kept = read();
    [this.seen, this.correct] = [kept.seen, kept.correct];
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
      return; // a file or a notebook may have no storage: it holds until the page is closed
    }
  }
}

function read(): StoredProgress {
  try {
    const found = JSON.parse(localStorage.getItem(KEY) ?? "{}") as Partial<StoredProgress>;
    const correct = Object.entries(found.correct ?? {}).filter(([, value]) => typeof value === "boolean");
    return { seen: Array.isArray(found.seen) ? found.seen.filter((each) => typeof each === "string") : [], correct: Object.fromEntries(correct) };
  } catch {
    return { seen: [], correct: {} };
  }
}

export const progressStore = new ProgressStore();
