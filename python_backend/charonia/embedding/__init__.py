"""What a text means, as a vector, and which of many texts is nearest to it. In numpy alone.

bert     a model that makes vectors of texts, from a checkpoint as sentence-transformers has it
nearest  vectors of earlier prompts, by whose they are
"""

from charonia.embedding.bert import Encoder
from charonia.embedding.nearest import Match, PromptIndex
from charonia.embedding.packaged import PACKAGE, load_encoder

__all__ = ["PACKAGE", "Encoder", "Match", "PromptIndex", "load_encoder"]
