"""The papers' numbered statements as bounds: functions of the constants that a paper names."""
