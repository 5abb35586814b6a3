"""What parts of loops that take many numbers at once are written of: vectors of numbers in flat arrays.

The compiler makes of them what the processor has.
"""

from __future__ import annotations

from typing import Any

LOT = 64  # numbers that are taken at once: bytes of a register of AVX-512, bits of a mask


class FlatArrays:
    """The arguments of a part of a loop: flat arrays, and behind each the place where its numbers begin."""

    def __init__(self, context: Any, builder: Any, signature: Any, given: Any):
        """Take what the compiler says of them."""
        self.context, self.builder, self.kinds, self.given = context, builder, signature.args, given

    def load(self, argument: int, count: int, offset: int = 0) -> Any:
        """Load `count` numbers, of which the first is `offset` behind the place."""
        begin, size = self._begin(argument, count, offset)
        vector = self.builder.load(begin)
        vector.align = size
        return vector

    def store(self, argument: int, vector: Any) -> None:
        """Store a vector from the place on."""
        begin, size = self._begin(argument, vector.type.count)
        self.builder.store(vector, begin).align = size

    def _begin(self, argument: int, count: int, offset: int = 0) -> tuple[Any, int]:
        from llvmlite import ir

        array, place = self.given[argument : argument + 2]
        data = self.context.make_array(self.kinds[argument])(self.context, self.builder, array).data
        begin = self.builder.gep(data, [self.builder.add(place, place.type(offset))])
        number = begin.type.pointee
        of_many = ir.VectorType(number, count).as_pointer()
        return self.builder.bitcast(begin, of_many), self.context.get_abi_sizeof(number)


def lanes(builder: Any, vectors: tuple[Any, Any], which: Any) -> Any:
    """Make a vector of some lanes of two: those of the second are counted behind those of the first."""
    from llvmlite import ir

    named = list(which)
    return builder.shuffle_vector(*vectors, ir.Constant(ir.VectorType(ir.IntType(32), len(named)), named))


def all_of(builder: Any, number: Any, count: int) -> Any:
    """Make a vector of one number."""
    from llvmlite import ir

    one = builder.insert_element(ir.Constant(ir.VectorType(number.type, 1), ir.Undefined), number, ir.IntType(32)(0))
    return lanes(builder, (one, one), [0] * count)
