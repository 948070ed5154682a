// The learner's file of one exercise in the editor: open, save, grade, hints, reset and solution, by queries to the server.
import { exerciseToken } from "../../lib/exerciseToken";
import { runQuery, type Progress } from "../../lib/queryClient";
import type { ExerciseFile, GradeReport, GradeResult, SaveResult } from "./exercises";
import { progressStore } from "./progressStore.svelte";

class EditorSession {
  file = $state.raw<ExerciseFile>();
  text = $state("");
  report = $state.raw<GradeReport>();
  solution = $state("");
  /** The file on disk, if another program has changed it since it was read. */
  conflict = $state.raw<ExerciseFile>();
  progress = $state.raw<Progress>();
  note = $state("");
  problem = $state("");
  isDirty = $derived(this.file !== undefined && this.text !== this.file.text);
  readonly number: number;
  #controller: AbortController | undefined;

  constructor(number: number) {
    this.number = number;
  }

  /** Read the file; text that was edited and not saved is kept. */
  async open(): Promise<void> {
    const keepsText = this.isDirty;
    await this.#attempt(async () => {
      const { data } = await this.#query<ExerciseFile>("open_exercise");
      if (keepsText && this.file?.version !== data.version) this.conflict = data;
      else if (!keepsText) this.#accept(data);
    });
  }

  async save(): Promise<void> {
    await this.#attempt(async () => {
      const { data } = await this.#query<SaveResult>("save_exercise", { text: this.text, version: this.file?.version ?? "" });
      this.#acceptSaved(data);
      if (data.is_saved) this.note = `Saved to ${data.exercise.file}.`;
    });
  }

  async grade(): Promise<void> {
    const controller = new AbortController();
    this.#controller = controller;
    this.report = undefined;
    this.progress = { completed: 0, total: 1, description: "saving the file" };
    await this.#attempt(async () => {
      const params = { text: this.text, version: this.file?.version ?? "" };
      const { data } = await this.#query<GradeResult>("grade_exercise", params, controller.signal);
      this.#acceptSaved(data);
      [this.report, this.note] = [data.report, data.note ?? ""];
    }, controller.signal);
    this.progress = undefined;
    if (controller.signal.aborted) {
      await this.#attempt(async () => this.#adoptVersion((await this.#query<ExerciseFile>("open_exercise")).data));
      this.note = "Canceled; the process was ended.";
    }
  }

  cancel(): void {
    this.#controller?.abort();
  }

  async showHint(): Promise<void> {
    await this.#attempt(async () => this.#updateRecord((await this.#query<ExerciseFile>("next_hint")).data));
  }

  async showSolution(): Promise<void> {
    await this.#attempt(async () => void (this.solution = (await this.#query<{ solution: string }>("show_solution")).data.solution));
  }

  async reset(): Promise<void> {
    await this.#attempt(async () => {
      const { data } = await this.#query<{ backup: string | null; exercise: ExerciseFile }>("reset_exercise");
      this.#accept(data.exercise);
      this.report = undefined;
      this.note = data.backup ? `The old file is kept as ${data.backup}.` : "";
    });
  }

  /** Resolve a conflict: keep the text of the editor, which then replaces the file on disk, or take that of the file. */
  async resolve(keep: "editor" | "file"): Promise<void> {
    const { conflict } = this;
    if (!conflict) return;
    this.conflict = undefined;
    if (keep === "file") this.#accept(conflict);
    else {
      this.#adoptVersion(conflict);
      await this.save();
    }
  }

  /** Show the text of a file. */
  #accept(file: ExerciseFile): void {
    this.#updateRecord(file);
    this.file = file;
    this.text = file.text;
  }

  #acceptSaved(result: SaveResult): void {
    if (result.is_saved) this.#adoptVersion(result.exercise);
    else this.conflict = result.exercise;
  }

  /** The file on disk is the one that the editor replaces from now on; the text of the editor stays. */
  #adoptVersion(file: ExerciseFile): void {
    this.#updateRecord(file);
    this.file = file;
  }

  /** Take hints and status, not the file's text and version. */
  #updateRecord(file: ExerciseFile): void {
    this.file = { ...file, text: this.file?.text ?? file.text, version: this.file?.version ?? file.version };
    progressStore.exercises = { ...progressStore.exercises, [String(this.number)]: file.status };
  }

  #query<T>(name: string, params: Record<string, unknown> = {}, signal?: AbortSignal): Promise<{ data: T }> {
    const onProgress = (progress: Progress): void => void (this.progress = this.progress && progress);
    return runQuery<T>(name, { token: exerciseToken(), number: this.number, ...params }, { ...(signal ? { signal } : {}), onProgress });
  }

  async #attempt(action: () => Promise<void>, signal?: AbortSignal): Promise<void> {
    [this.problem, this.note] = ["", ""];
    try {
      await action();
    } catch (error) {
      if (!signal?.aborted) this.problem = (error as Error).message;
    }
  }
}

const sessions = new Map<number, EditorSession>();

/** The session of an exercise, which lasts until the page is closed, so that text is not lost when another exercise is opened. */
export function editorSession(number: number): EditorSession {
  const session = sessions.get(number) ?? new EditorSession(number);
  sessions.set(number, session);
  return session;
}

/** Whether the text of an exercise is edited and not saved. */
export const hasUnsavedText = (): boolean => [...sessions.values()].some((session) => session.isDirty);
