"""The methods of the five papers, and FedSLR's ablations LPGD and GPGD."""
