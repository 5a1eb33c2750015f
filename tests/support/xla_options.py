"""XLA's options that tests compile with."""

from jaxlib.version import __version_info__

_HAS_OLD_EMITTERS = __version_info__ < (0, 11)
"""Whether XLA's CPU compiler can do without its fusion emitters, whose code takes longer to compile."""

QUICK_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_multi_thread_eigen=false"
QUICK_FLAGS += " --xla_cpu_use_fusion_emitters=false" * _HAS_OLD_EMITTERS
"""For `XLA_FLAGS`: programs that compile fast and run slowly, each operation on one core."""

AS_USERS: dict[str, bool] = {"xla_cpu_use_fusion_emitters": True} if _HAS_OLD_EMITTERS else {}
"""Programs round as users' do, also where `QUICK_FLAGS` are set."""
