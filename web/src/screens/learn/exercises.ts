// Types of the learner's file of an exercise and of its grades, as in cutaway.learn.runner.grader.

export interface ExerciseFile {
  file: string;
  text: string;
  /** Hash of the file's content; empty if there is no file yet. */
  version: string;
  is_notebook: boolean;
  status: string;
  attempts: number;
  /** Hints shown so far. */
  hints: string[];
  num_available_hints: number;
  may_show_solution: boolean;
}

export interface TaskGrade {
  name: string;
  status: "correct" | "incorrect" | "not_written" | "missing" | "error";
  message: string;
  /** Names of the likely mistakes; the hint of each has the same index. */
  mistakes: string[];
  hints: string[];
  location: string;
}

export interface GradeReport {
  status: "passed" | "failed" | "partial" | "not_written" | "error";
  message: string;
  location: string;
  tasks: TaskGrade[];
  notes: { message: string; location: string }[];
  output: string;
}

export interface SaveResult {
  /** False if another program has changed the file; nothing was written then. */
  is_saved: boolean;
  exercise: ExerciseFile;
}

export interface GradeResult extends SaveResult {
  report?: GradeReport;
  /** Why the progress could not be stored; may be empty. */
  note?: string;
}
