"""A real Slurm cluster of several nodes on one host, in one private folder."""

from tools.slurm_box.box import Box, default_root
from tools.slurm_box.history import JobRecord
from tools.slurm_box.plan import BoxSpec, Group

__all__ = ["Box", "BoxSpec", "Group", "JobRecord", "default_root"]
