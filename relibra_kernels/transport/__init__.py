"""Moving tokens, weights and gradients between the ranks of one EP group."""

from relibra_kernels.transport.dispatch import Arrival as Arrival
from relibra_kernels.transport.dispatch import DispatchTransport as DispatchTransport
from relibra_kernels.transport.dispatch import FlatDispatch as FlatDispatch
from relibra_kernels.transport.replica import DistReplica as DistReplica
from relibra_kernels.transport.replica import ReplicaTransport as ReplicaTransport
from relibra_kernels.transport.two_hop import Relay as Relay
from relibra_kernels.transport.two_hop import TwoHopDispatch as TwoHopDispatch
