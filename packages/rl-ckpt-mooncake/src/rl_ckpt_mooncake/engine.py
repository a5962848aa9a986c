"""The mooncake checkpoint engine."""

from rl_ckpt_mooncake.config import MooncakeConfig
from rl_ckpt_mooncake.library import load_library
from rl_ckpt_mooncake.transfer import Listening, check_protocol
from rl_ckpt_mooncake.transport import ChainTransport
from rl_core.interfaces import TransferRole
from rl_core.transfer.engine import StreamingEngine, check_role


class MooncakeCheckpointEngine(StreamingEngine):
    """Every receiver reads from the rank before it, the first one from sender 0."""

    def __init__(self, config: MooncakeConfig, role: TransferRole) -> None:
        """Starts nothing, but loads Mooncake; not in the senders that only draw their streams.

        With it comes a Go runtime with threads of its own, which they can do without.

        Errors: ConfigError (role, protocol), ComponentNotFoundError naming the extra to install,
        ComponentLoadError naming a missing shared library, IncompatibleVersionError.
        """
        check_role(role)
        protocol = config.protocol_for(role.device)
        check_protocol(protocol)
        if role.role == "receiver" or role.rank == 0:
            load_library(role.device)
        listening = Listening(
            role.host, protocol, role.device, config.device_name, config.stall_timeout_s
        )
        super().__init__(role, ChainTransport(listening, role.key, config.piece_bytes))
