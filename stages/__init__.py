"""Stages, one a file, and in folders what they stand on.

advantages/    formulas and presets of the normalizer
engines/       policies, and the engines that generate for them
rewards/       shaping, and functions of the user's own
teachers/      who answers a `Teacher`
losses/        what a trainer minimises
training/      the torch trainer, on one rank and on several
integrations/  one module a foreign framework
"""
