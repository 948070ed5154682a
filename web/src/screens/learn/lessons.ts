// What the server tells of lessons, questions and exercises; and whether an answer is right.

export interface Lesson {
  slug: string;
  title: string;
  sentences: string[];
  /** A site in the block that is looked at, one outside blocks, or a picture's name. */
  figure: string;
  notebook: number;
  docs_page: string;
  exercises: number[];
  questions: string[];
}

export interface QuizChoice {
  text: string;
  explanation: string;
  correct: boolean;
}

interface Common {
  id: string;
  question: string;
  notebooks: number[];
  /** Python that computes the right answer; empty where nothing is to be computed. */
  proof: string;
}

export type Question =
  | (Common & { kind: "choice"; choices: QuizChoice[]; multiple: boolean })
  | (Common & { kind: "number"; answer: number; tolerance: number; unit: string; explanation: string; common_mistakes: { value: number; mistake: string; explanation: string }[] });

export interface Exercise {
  number: number;
  title: string;
  minutes: number;
  hints: string[];
}

export interface Lessons {
  lessons: Lesson[];
  questions: Record<string, Question>;
  sections: { title: string; questions: string[] }[];
  exercises: Record<string, Exercise>;
}

export interface Verdict {
  correct: boolean;
  /** Of what was answered. */
  explanations: string[];
  /** The right answer and its reason, where another was given. */
  correction?: string;
}

/** What was picked, by its place; or a number as it was typed. */
export function gradeAnswer(question: Question, given: number[] | string): Verdict | undefined {
  if (question.kind === "choice") {
    const picked = question.choices.filter((_, number) => (given as number[]).includes(number));
    const correct = question.choices.every((choice) => choice.correct === picked.includes(choice));
    if (correct) return { correct, explanations: picked.map((choice) => choice.explanation) };
    const best = question.choices.filter((choice) => choice.correct);
    return { correct, explanations: picked.filter((choice) => !choice.correct).map((choice) => choice.explanation), correction: best.map((choice) => `${choice.text}. ${choice.explanation}`).join(" ") };
  }
  const value = parseNumber(given as string);
  if (value === undefined) return undefined;
  const close = (to: number): boolean => Math.abs(value - to) <= question.tolerance * (Math.abs(to) || 1) + 1e-12;
  if (close(question.answer)) return { correct: true, explanations: [question.explanation] };
  const mistake = question.common_mistakes.find((each) => close(each.value));
  return { correct: false, explanations: mistake ? [`${mistake.mistake[0]?.toUpperCase()}${mistake.mistake.slice(1)}: ${mistake.explanation}`] : [], correction: `${formatAnswer(question.answer)} ${question.unit}. ${question.explanation}` };
}

/** Counts in full, others to six digits. */
const formatAnswer = (value: number): string => value.toLocaleString("en", Number.isInteger(value) ? {} : { maximumSignificantDigits: 6 });

const POWERS: Record<string, number> = { "": 1, k: 1e3, m: 1e6, b: 1e9, g: 1e9, t: 1e12 };

/** `1,875`, `1.4e10`, `134M`; nothing where it is no number. */
export function parseNumber(typed: string): number | undefined {
  const found = /^\s*([+−-]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)\s*([kmbgt]?)\s*$/i.exec(typed);
  if (!found) return undefined;
  const value = Number((found[1] ?? "").replace(/,/g, "").replace("−", "-")) * (POWERS[(found[2] ?? "").toLowerCase()] ?? NaN);
  return Number.isFinite(value) ? value : undefined;
}
