"""Trainers with the constructors of transformers and TRL: change the import and the class of a script."""

from .trainer import Trainer as Trainer
from .trl_trainers import DPOTrainer as DPOTrainer
from .trl_trainers import GRPOTrainer as GRPOTrainer
from .trl_trainers import KTOTrainer as KTOTrainer
from .trl_trainers import RewardTrainer as RewardTrainer
from .trl_trainers import SFTTrainer as SFTTrainer

__all__ = ["DPOTrainer", "GRPOTrainer", "KTOTrainer", "RewardTrainer", "SFTTrainer", "Trainer"]
