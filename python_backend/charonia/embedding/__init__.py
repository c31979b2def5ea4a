"""Vectors of texts, and the nearest of many texts to another one. Uses only numpy.

bert     computes vectors, from a checkpoint as sentence-transformers writes it
nearest  vectors of earlier prompts, by scope
"""

from charonia.embedding.bert import Encoder
from charonia.embedding.nearest import Match, PromptIndex
from charonia.embedding.packaged import PACKAGE, load_encoder

__all__ = ["PACKAGE", "Encoder", "Match", "PromptIndex", "load_encoder"]
