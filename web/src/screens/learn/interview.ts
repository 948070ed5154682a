// Interview questions, and the order in which they are asked.

export interface InterviewQuestion {
  id: string;
  level: string;
  type: string;
  topic: string;
  question: string;
  /** The model answer. */
  paragraphs: string[];
  key_points: string[];
  notebooks: number[];
  exercise: number | null;
}

/** Questions in order: with missed key points, new, then complete. `points` are the key points of the last answers, by id. */
export function orderQuestions(questions: InterviewQuestion[], points: Record<string, number>): InterviewQuestion[] {
  const rank = ({ id, key_points }: InterviewQuestion): number => {
    const count = points[id];
    return count === undefined ? 1 : count < key_points.length ? 0 : 2;
  };
  return [...questions].sort((a, b) => rank(a) - rank(b));
}
