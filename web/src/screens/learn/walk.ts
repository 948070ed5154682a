// What the server tells of lessons, questions and exercises; and whether an answer is right.

export interface Lesson {
  slug: string;
  title: string;
  sentences: string[];
  /** A site in the block that is looked at, one outside blocks, or a picture's name. */
  shows: string;
  notebook: number;
  page: string;
  exercises: number[];
  questions: string[];
}

export interface Choice {
  text: string;
  why: string;
  right: boolean;
}

interface Common {
  id: string;
  ask: string;
  see: number[];
  /** Python that computes the right answer; empty where nothing is to be computed. */
  proof: string;
}

export type Question =
  | (Common & { kind: "choice"; choices: Choice[]; several: boolean })
  | (Common & { kind: "number"; answer: number; tolerance: number; unit: string; why: string; near: { value: number; mistake: string; why: string }[] });

export interface Exercise {
  number: number;
  title: string;
  minutes: number;
  hints: string[];
}

export interface Walk {
  lessons: Lesson[];
  questions: Record<string, Question>;
  headings: { title: string; questions: string[] }[];
  exercises: Record<string, Exercise>;
}

export interface Verdict {
  right: boolean;
  /** Of what was answered. */
  why: string[];
  /** The right answer and its reason, where another was given. */
  rather?: string;
}

/** What was picked, by its place; or a number as it was typed. */
export function judged(question: Question, given: number[] | string): Verdict | undefined {
  if (question.kind === "choice") {
    const picked = question.choices.filter((_, number) => (given as number[]).includes(number));
    const right = question.choices.every((choice) => choice.right === picked.includes(choice));
    if (right) return { right, why: picked.map((choice) => choice.why) };
    const best = question.choices.filter((choice) => choice.right);
    return { right, why: picked.filter((choice) => !choice.right).map((choice) => choice.why), rather: best.map((choice) => `${choice.text}. ${choice.why}`).join(" ") };
  }
  const value = number(given as string);
  if (value === undefined) return undefined;
  const close = (to: number): boolean => Math.abs(value - to) <= question.tolerance * (Math.abs(to) || 1) + 1e-12;
  if (close(question.answer)) return { right: true, why: [question.why] };
  const near = question.near.find((each) => close(each.value));
  return { right: false, why: near ? [`${near.mistake[0]?.toUpperCase()}${near.mistake.slice(1)}: ${near.why}`] : [], rather: `${said(question.answer)} ${question.unit}. ${question.why}` };
}

/** Counts in full, others to six digits. */
const said = (value: number): string => value.toLocaleString("en", Number.isInteger(value) ? {} : { maximumSignificantDigits: 6 });

const POWERS: Record<string, number> = { "": 1, k: 1e3, m: 1e6, b: 1e9, g: 1e9, t: 1e12 };

/** `1,875`, `1.4e10`, `134M`; nothing where it is no number. */
export function number(typed: string): number | undefined {
  const found = /^\s*([+−-]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)\s*([kmbgt]?)\s*$/i.exec(typed);
  if (!found) return undefined;
  const value = Number((found[1] ?? "").replace(/,/g, "").replace("−", "-")) * (POWERS[(found[2] ?? "").toLowerCase()] ?? NaN);
  return Number.isFinite(value) ? value : undefined;
}
