"""Stages and their parts, in folders. Each imports only those before it.

contracts/     protocols and values that the others share
tokenizers/    texts to tokens and back, chat templates
http/          requests to servers: retries, bounded answers, streams; a server within bounds
data/          prompts by number: rows, in a seeded order, split and mixed
losses/        losses that a trainer minimises
advantages/    AdvantageNormalizer, KLReward, TruncationMask; formulas and presets
models/        models in folders as transformers saves them; micro-batches and scoring
rewards/       RewardBridge: shaping, and reward functions of the user
engines/       engines that generate for policies: in torch, or at an inference server
teachers/      Teacher, and the sources of its log-probabilities
sampling/      SourceEnv and GroupAssembler: environments, bounds on lag, evaluation, samples
batching/      Batcher
senders/       groups that other processes send, and their journal; the batches of a recording
training/      the torch trainer, on one rank and on several
sink/          SinkTrainer: steps, evaluations, the best checkpoint
training_run/  runs that a configuration describes
integrations/  one package for each foreign framework
"""
