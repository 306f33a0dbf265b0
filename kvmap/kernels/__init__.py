"""Operations where time counts: a folder for each, with its reference, its paths and their choice."""
