"""Stages, one in each file, and the folders that they use.

advantages/    formulas and presets of the normalizer
engines/       policies, and the engines that generate for them
rewards/       shaping, and reward functions of the user
teachers/      teachers for the stage `Teacher`
losses/        losses that a trainer minimises
training/      the torch trainer, on one rank and on several
integrations/  one package for each foreign framework
"""
