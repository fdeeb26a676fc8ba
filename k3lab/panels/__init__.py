"""The live panels of the notebooks, one a file: draw(values) is a pure function, show() hands it to k3lab.explore."""
