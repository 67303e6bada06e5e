"""Trainers with the constructors of transformers and TRL: change the import and the class of a script."""

from .trainer import Trainer
from .trl_trainers import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer

__all__ = ["DPOTrainer", "GRPOTrainer", "KTOTrainer", "RewardTrainer", "SFTTrainer", "Trainer"]
