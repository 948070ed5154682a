"""The model's forward again, on sizes instead of numbers: what is multiplied, kept and alive on the way."""

from cutaway.size.walk.passes import Pass, read, train
from cutaway.size.walk.setting import Setting
from cutaway.size.walk.storage import Weight
from cutaway.size.walk.tally import Tally

__all__ = ["Pass", "Setting", "Tally", "Weight", "read", "train"]
