"""The hccl checkpoint engine."""

from rl_ckpt_hccl.config import HcclConfig
from rl_ckpt_hccl.process_group import Library
from rl_ckpt_hccl.transport import BroadcastTransport
from rl_core.interfaces import TransferRole
from rl_core.transfer.engine import StreamingEngine, check_role


class HcclCheckpointEngine(StreamingEngine):
    """Sender 0 broadcasts buckets to all receivers at once, with the library of the device."""

    def __init__(self, config: HcclConfig, role: TransferRole) -> None:
        """Makes nothing but a check of what torch offers.

        Errors: ConfigError, IncompatibleVersionError naming the torch version,
        ComponentNotFoundError.
        """
        check_role(role)
        library = Library(config.communicator_for(role.device), role.device, role.host)
        transport = BroadcastTransport(library, config.direct_share, config.connect_timeout_s)
        super().__init__(role, transport)
