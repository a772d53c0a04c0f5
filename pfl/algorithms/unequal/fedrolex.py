"""FedRolex.

Alam, Liu, Yan, Zhang, "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model
Extraction", NeurIPS 2022.
"""

from pfl.method import NestedNetworks


class FedRolex(NestedNetworks):
    """HeteroFL with parts that move by one unit a layer in every round (Algorithm 1).

    In round t the part of a client with s of the S units of a layer has the units
    t, t + 1, ..., t + s - 1, counted modulo S (equation 2); the rest is HeteroFL's.

    Evaluated, shared, newcomers and cost as for `HeteroFL`; a client's part in an evaluation is
    that of the coming round.

    Args:
        mask_classes: As for `HeteroFL`.

    Note:
        The inputs of the network and its classes never roll. As in HeteroFL here, there is no
        Scaler and no static batch normalization. In the authors' code the parts of round t begin
        with the unit -t, and values are weighted by how often they were trained before.

    Example:
        >>> from pfl.models import MLP, Family
        >>> method = FedRolex(Family({"large": MLP(64, (8,)), "small": MLP(64, (2,))}))
        >>> method.first_unit(3)
        3
    """

    def first_unit(self, round_index: int) -> int:
        return round_index
