"""Whether more or less of a metric is better, by its name: the one rule for training, sweeps and
views.

Names are read word by word, so `mape` is not a `map` and `accumulated_error` no accuracy.
"""

from __future__ import annotations

import re
from functools import lru_cache

_HIGHER_WORDS = (
    r"acc|accuracy|auc|auroc|roc_auc|auprc|f1|fbeta|recall|precision|sensitivity|specificity|ndcg"
    r"|mrr|map|hits?|r2|bleu|rouge[a-z]?|meteor|m?iou|jaccard|dice|psnr|ssim|snr|mfu|samples_per_s"
    r"|corr|correlation|pearson|spearman|kendall|kappa|matthews|mcc|reward|return|wins?"
    r"|(f1|r2)scores?"
)
_LOWER_WORDS = (
    r"loss(es)?|errors?|err|mae|mse|rmse|rmsle|msle|mape|smape|perplexity|ppl|nll|bce|cross_?entropy"
    r"|divergence|kl|distance|hamming|wer|cer|mer|ter|fid|kid|lpips|brier|ece|regret|cost"
    r"|deviance|residuals?|bpb|bpc|logloss|latency|fpr|fnr|step_ms"
)
_HIGHER = re.compile(rf"(?<![a-z])({_HIGHER_WORDS})(?![a-z])")
_LOWER = re.compile(rf"(?<![a-z])({_LOWER_WORDS})(?![a-z])")
_SCORE = re.compile(r"(?<![a-z])scores?(?![a-z])")
"""Higher is better, unless another word says otherwise: `brier_score`."""
_WORD_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[a-z][a-z0-9])(?=[A-Z])")
"""In a name such as `BinaryAccuracy` or `BinaryAUROC`, but not in `mAP`."""


@lru_cache(4096)
def guess_best_is(name: str) -> str | None:
    """Return whether the best value of a metric is its `max` or its `min`; None for a name that
    says neither, or both, such as `accuracy_loss`."""
    words = _WORD_BORDER.sub("_", name).lower()
    is_higher, is_lower = _HIGHER.search(words), _LOWER.search(words)
    if is_higher and is_lower:
        return None
    if is_higher or is_lower:
        return "max" if is_higher else "min"
    return "max" if _SCORE.search(words) else None
