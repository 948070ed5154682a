// Types of lessons, quiz questions and exercises, and the grading of answers.

/** A statement of books or papers, with the verdict of a test or measurement. */
export interface Claim {
  id: string;
  statement: string;
  verdict: string;
  /** Condition or correction; may be empty. */
  explanation: string;
  /** Measured figure; may be empty. */
  figure: string;
  /** Notebooks, and commands and tests, that show it. */
  notebooks: number[];
  commands: string[];
}

export interface Lesson {
  slug: string;
  title: string;
  sentences: string[];
  /** Site suffix in the selected block, a site outside blocks, or the name of a figure. */
  figure: string;
  notebook: number;
  docs_page: string;
  exercises: number[];
  questions: string[];
  claims: Claim[];
}

export interface QuizChoice {
  text: string;
  explanation: string;
  correct: boolean;
}

export type QuizLevel = "recall" | "reason" | "what-if";

interface QuestionBase {
  id: string;
  level: QuizLevel;
  topic: string;
  topic_title: string;
  question: string;
  notebooks: number[];
  /** Python code that verifies the answer; may be empty. */
  proof: string;
  /** Claims that the question is about. */
  claims: Claim[];
}

export type Question =
  | (QuestionBase & { kind: "choice"; choices: QuizChoice[]; multiple: boolean })
  | (QuestionBase & { kind: "number"; answer: number; tolerance: number; unit: string; explanation: string; common_mistakes: { value: number; mistake: string; explanation: string }[] });

export interface Exercise {
  number: number;
  title: string;
  minutes: number;
  hints: string[];
  notebook: number;
  /** Text of the task, as HTML. */
  instructions: string;
}

export interface Lessons {
  lessons: Lesson[];
  questions: Record<string, Question>;
  sections: { title: string; questions: string[] }[];
  exercises: Record<string, Exercise>;
}

export interface Verdict {
  correct: boolean;
  /** Explanations of the given answer. */
  explanations: string[];
  /** The correct answer with its explanation, if the given one is incorrect. */
  correction?: string;
}

/** Grade selected choices (by index) or a typed number; undefined if the text is not a number. */
export function gradeAnswer(question: Question, answer: number[] | string): Verdict | undefined {
  if (question.kind === "choice") {
    const picked = question.choices.filter((_, number) => (answer as number[]).includes(number));
    const correct = question.choices.every((choice) => choice.correct === picked.includes(choice));
    if (correct) return { correct, explanations: picked.map((choice) => choice.explanation) };
    const correctChoices = question.choices.filter((choice) => choice.correct);
    return { correct, explanations: picked.filter((choice) => !choice.correct).map((choice) => choice.explanation), correction: correctChoices.map((choice) => `${choice.text}. ${choice.explanation}`).join(" ") };
  }
  const value = parseNumber(answer as string);
  if (value === undefined) return undefined;
  const isClose = (to: number): boolean => Math.abs(value - to) <= question.tolerance * (Math.abs(to) || 1) + 1e-12;
  if (isClose(question.answer)) return { correct: true, explanations: [question.explanation] };
  const mistake = question.common_mistakes.find((candidate) => isClose(candidate.value));
  return { correct: false, explanations: mistake ? [`${mistake.mistake[0]?.toUpperCase()}${mistake.mistake.slice(1)}: ${mistake.explanation}`] : [], correction: `${formatAnswer(question.answer)} ${question.unit}. ${question.explanation}` };
}

/** Integers in full, other numbers to six significant digits. */
const formatAnswer = (value: number): string => value.toLocaleString("en", Number.isInteger(value) ? {} : { maximumSignificantDigits: 6 });

const SUFFIXES: Record<string, number> = { "": 1, k: 1e3, m: 1e6, b: 1e9, g: 1e9, t: 1e12 };

/** Parse numbers such as `1,875`, `1.4e10` and `134M`; undefined if the text is not a number. */
export function parseNumber(typed: string): number | undefined {
  const match = /^\s*([+−-]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)\s*([kmbgt]?)\s*$/i.exec(typed);
  if (!match) return undefined;
  const value = Number((match[1] ?? "").replace(/,/g, "").replace("−", "-")) * (SUFFIXES[(match[2] ?? "").toLowerCase()] ?? NaN);
  return Number.isFinite(value) ? value : undefined;
}
