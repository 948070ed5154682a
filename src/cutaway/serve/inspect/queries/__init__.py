"""Inspector queries: the registry of query classes by name."""

from typing import TYPE_CHECKING

from cutaway.serve.inspect.queries import attention
from cutaway.serve.inspect.queries.ablation_results import AblationResults
from cutaway.serve.inspect.queries.activation import Activation
from cutaway.serve.inspect.queries.activation_patching import ActivationPatching, PatchEffect
from cutaway.serve.inspect.queries.architecture import Architecture
from cutaway.serve.inspect.queries.compare_texts import (
    CompareAttention,
    CompareLogitLens,
    CompareResidualStreams,
    CompareTexts,
)
from cutaway.serve.inspect.queries.consistency_check import ConsistencyCheck
from cutaway.serve.inspect.queries.edit_effect import EditEffect
from cutaway.serve.inspect.queries.edit_experiment import EditExperiment
from cutaway.serve.inspect.queries.exercises import (
    GradeExercise,
    NextHint,
    OpenExercise,
    ResetExercise,
    SaveExercise,
    ShowSolution,
)
from cutaway.serve.inspect.queries.find_token import FindToken
from cutaway.serve.inspect.queries.generation import FillMask, Generate
from cutaway.serve.inspect.queries.gradient_norms import GradientsByDepth, GradientsByPlacement
from cutaway.serve.inspect.queries.interventions import Interventions
from cutaway.serve.inspect.queries.learner_progress import LearnerProgress, RecordInterviewAnswer, RecordQuizAnswer
from cutaway.serve.inspect.queries.lessons import InterviewQuestions, Lessons
from cutaway.serve.inspect.queries.logit_attribution import LogitAttribution
from cutaway.serve.inspect.queries.model_check import ListChecks, RunCheck
from cutaway.serve.inspect.queries.model_info import ModelInfo, Tokenize
from cutaway.serve.inspect.queries.model_size import MemoryFit, ModelSizes, SizeCatalog
from cutaway.serve.inspect.queries.models import ListModels, OpenModel
from cutaway.serve.inspect.queries.next_token import NextToken
from cutaway.serve.inspect.queries.patching_metric import PatchingMetric
from cutaway.serve.inspect.queries.residual_stream import ResidualNorms, TokenJourney
from cutaway.serve.inspect.queries.run_checkpoints import CheckpointActivations, RunCheckpoints
from cutaway.serve.inspect.queries.run_metrics import RunMetrics
from cutaway.serve.inspect.queries.suggest_changed_text import SuggestChangedText
from cutaway.serve.inspect.queries.trained_variants import TrainedVariants, VariantContinuation
from cutaway.serve.inspect.queries.worked_attention import WorkedAttention

if TYPE_CHECKING:
    from cutaway.serve.inspect.queries.base import Query

QUERIES: dict[str, "type[Query]"] = {
    "model_info": ModelInfo,
    "architecture": Architecture,
    "list_models": ListModels,
    "open_model": OpenModel,
    "tokenize": Tokenize,
    "residual_norms": ResidualNorms,
    "journey": TokenJourney,
    "attention_layers": attention.AttentionLayers,
    "attention_thumbnails": attention.AttentionThumbnails,
    "attention_head": attention.AttentionHead,
    "attention_row": attention.AttentionRow,
    "worked_attention": WorkedAttention,
    "logit_attribution": LogitAttribution,
    "head_types": attention.HeadTypes,
    "generate": Generate,
    "fill_mask": FillMask,
    "activation": Activation,
    "next_token": NextToken,
    "find_token": FindToken,
    "attention_by_layer": attention.AttentionByLayer,
    "consistency_check": ConsistencyCheck,
    "edit_effect": EditEffect,
    "edit_experiment": EditExperiment,
    "interventions": Interventions,
    "compare_texts": CompareTexts,
    "compare_residual_streams": CompareResidualStreams,
    "compare_logit_lens": CompareLogitLens,
    "compare_attention": CompareAttention,
    "suggest_changed_text": SuggestChangedText,
    "patching_metric": PatchingMetric,
    "activation_patching": ActivationPatching,
    "patch_effect": PatchEffect,
    "ablation_results": AblationResults,
    "trained_variants": TrainedVariants,
    "variant_continuation": VariantContinuation,
    "gradients_by_placement": GradientsByPlacement,
    "gradients_by_depth": GradientsByDepth,
    "run_metrics": RunMetrics,
    "run_checkpoints": RunCheckpoints,
    "checkpoint_activations": CheckpointActivations,
    "size_catalog": SizeCatalog,
    "model_sizes": ModelSizes,
    "memory_fit": MemoryFit,
    "list_checks": ListChecks,
    "run_check": RunCheck,
    "lessons": Lessons,
    "interview_questions": InterviewQuestions,
    "learner_progress": LearnerProgress,
    "record_quiz_answer": RecordQuizAnswer,
    "record_interview_answer": RecordInterviewAnswer,
    "open_exercise": OpenExercise,
    "save_exercise": SaveExercise,
    "grade_exercise": GradeExercise,
    "reset_exercise": ResetExercise,
    "next_hint": NextHint,
    "show_solution": ShowSolution,
}
