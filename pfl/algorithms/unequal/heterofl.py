"""HeteroFL.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", ICLR 2021.
"""

from pfl.method import NestedNetworks


class HeteroFL(NestedNetworks):
    """Clients with fewer units a layer train the first units of the server's (Algorithm 1).

    w_i = the first rows and columns of each layer of w^t;  w_i <- w_i - η g_i(w_i), local steps;
    w^{t+1}[p] = the plain mean of w_i[p] over the clients of the round that have the value p
    (equations 3 to 5), and w^t[p] where none has it.

    Evaluated: w on all clients, and for each client the part of w that its network has. Shared:
    these parts. Personal: nothing. A newcomer receives the part of its network. Cost: the values of
    the client's network down and up; `local_epochs` epochs of its gradients. No client state, no
    server state.

    The networks are a `pfl.models.Family`, the widest one first: `Family({"large": MLP(64, (64,)),
    "small": MLP(64, (16,))})`. With one network for all it is FedAvg with plain means.

    Args:
        mask_classes: Whether scores of classes that a client does not have are set to 0 in its loss
            (Section 3, "masking trick").

    Note:
        Left out: the Scaler, which divides what a narrow layer gives by its share of the units in
        training; and static batch normalization, whose statistics are asked of all clients at the
        end: take GroupNorm. The widths here are those of the networks, and stay; in the paper's
        dynamic setting a client draws a width in every round. In the authors' code the head's
        values of a class are averaged over the clients that have the class; here the others send
        them as they got them.

    Example:
        >>> from pfl.models import MLP, Family
        >>> method = HeteroFL(Family({"large": MLP(64, (8,)), "small": MLP(64, (2,))}))
        >>> method.global_model.shape  # the server's, 64 * 8 + 8 + 8 * 10 + 10
        torch.Size([610])
    """
