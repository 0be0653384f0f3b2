"""What stages and engines share: protocols of policies, teachers and models, sampling parameters, stacks of groups."""
