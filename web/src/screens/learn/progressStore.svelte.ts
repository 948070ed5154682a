// Progress of the learner. With the token of the server it is stored in the same files as that of `cutaway learn`; otherwise
// in localStorage where available. The lessons that were opened are always stored in localStorage.
import { exerciseToken } from "../../lib/exerciseToken";
import { exportedPage } from "../../lib/exportTransport";
import { runQuery } from "../../lib/queryClient";

const KEY = "cutaway.learn";
const EXPORTED = "this page is a file without a server; use the commands of `cutaway learn`";

interface StoredProgress {
  seen: string[];
  correct: Record<string, boolean>;
  points: Record<string, number>;
}

interface ServerProgress {
  /** Why the server neither stores progress nor runs code for this page; empty if it does. */
  problem: string;
  quiz?: Record<string, boolean>;
  interview?: Record<string, number>;
  exercises?: Record<string, string>;
}

class ProgressStore {
  seen = $state<string[]>([]);
  /** Whether the last answer was correct, by id of a quiz question. */
  correct = $state<Record<string, boolean>>({});
  /** Number of key points of the last answer, by id of an interview question. */
  points = $state<Record<string, number>>({});
  /** Status of each exercise, by its number; empty if unknown. */
  exercises = $state<Record<string, string>>({});
  /** Why exercises cannot be run on this page; undefined until it is known, empty if they can. */
  accessProblem = $state<string>();
  /** Why the last answer could not be stored. */
  problem = $state("");

  constructor() {
    const stored = readStoredProgress();
    [this.seen, this.correct, this.points] = [stored.seen, stored.correct, stored.points];
  }

  /** Whether the progress is that of `cutaway learn`. */
  get isOnServer(): boolean {
    return this.accessProblem === "";
  }

  async load(signal: AbortSignal): Promise<void> {
    if (exportedPage()) {
      this.accessProblem = EXPORTED;
      return;
    }
    try {
      const { data } = await runQuery<ServerProgress>("learner_progress", { token: exerciseToken() }, { signal });
      if (!data.problem) [this.correct, this.points, this.exercises] = [data.quiz ?? {}, data.interview ?? {}, data.exercises ?? {}];
      this.accessProblem = data.problem;
    } catch (error) {
      if (!signal.aborted) this.accessProblem = (error as Error).message;
    }
  }

  markSeen(slug: string): void {
    if (this.seen.includes(slug)) return;
    this.seen = [...this.seen, slug];
    this.#write({ seen: this.seen });
  }

  answer(id: string, correct: boolean): void {
    this.correct = { ...this.correct, [id]: correct };
    if (this.isOnServer) void this.#send("record_quiz_answer", { id, correct });
    else this.#write({ correct: this.correct });
  }

  answerInterview(id: string, numPoints: number): void {
    this.points = { ...this.points, [id]: numPoints };
    if (this.isOnServer) void this.#send("record_interview_answer", { id, num_points: numPoints });
    else this.#write({ points: this.points });
  }

  async #send(query: string, params: Record<string, unknown>): Promise<void> {
    try {
      this.problem = (await runQuery<{ note: string }>(query, { token: exerciseToken(), ...params })).data.note;
    } catch (error) {
      this.problem = `the answer was not stored: ${(error as Error).message}`;
    }
  }

  #write(changes: Partial<StoredProgress>): void {
    try {
      localStorage.setItem(KEY, JSON.stringify({ ...readStoredProgress(), ...changes }));
    } catch {
      return; // files and notebooks may have no storage: progress lasts until the page is closed
    }
  }
}

function readStoredProgress(): StoredProgress {
  try {
    const stored = JSON.parse(localStorage.getItem(KEY) ?? "{}") as Partial<StoredProgress>;
    return {
      seen: Array.isArray(stored.seen) ? stored.seen.filter((slug) => typeof slug === "string") : [],
      correct: keepType(stored.correct, "boolean"),
      points: keepType(stored.points, "number"),
    };
  } catch {
    return { seen: [], correct: {}, points: {} };
  }
}

/** Entries of a stored object whose values have this type. */
function keepType<T>(stored: Record<string, T> | undefined, type: "boolean" | "number"): Record<string, T> {
  return Object.fromEntries(Object.entries(stored ?? {}).filter(([, value]) => typeof value === type));
}

export const progressStore = new ProgressStore();
