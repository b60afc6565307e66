"""One rank of a run of any size on one core: the real code over fake tensors and fake collectives."""
